"""What a person sees: the command line, the live status, the report."""
