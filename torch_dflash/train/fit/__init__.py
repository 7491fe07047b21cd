"""Stage three: fits a drafter to the features."""
