"""Training state on disk by canonical name and global slice, so that any plan loads what any other plan saved."""
