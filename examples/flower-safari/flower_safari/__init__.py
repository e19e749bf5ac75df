"""A Flower app that trains with SAFARI."""
