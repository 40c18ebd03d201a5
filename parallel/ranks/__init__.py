"""Several processes that train one job together, each with a card or a group of cards; torchrun starts them."""
