"""What runs jobs: claim, run, settle, and keep the session alive."""
