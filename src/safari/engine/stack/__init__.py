"""Many clients as one: storage, layers, training and masks, stacked."""
