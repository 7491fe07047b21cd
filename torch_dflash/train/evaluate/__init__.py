"""Stage four: how many drafts of a fitted drafter the target accepts."""
