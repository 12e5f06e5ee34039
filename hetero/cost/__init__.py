"""What a plan costs in seconds and bytes, predicted from measured profiles. No torch."""
