"""What a person reads: tables of plans and runs."""
