"""What each subcommand of the command line does, as plain functions."""
