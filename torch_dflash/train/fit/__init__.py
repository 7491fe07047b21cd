"""Stage three: a drafter fitted to the features."""
