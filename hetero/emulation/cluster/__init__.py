"""Tells when devices and links of the emulated cluster would be done, and what they would hold, without torch."""
