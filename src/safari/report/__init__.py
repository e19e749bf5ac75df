"""What a run came to: the table, the figures, one page; and trackers that follow it."""
