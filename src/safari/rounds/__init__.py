"""Functions of a round that our own engines and Flower share."""
