"""What a round is made of, whoever runs it: our own engines and Flower build on the same functions."""
