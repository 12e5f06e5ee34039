"""The emulated cluster: when its devices and links would be done, and what its devices would hold. No torch."""
