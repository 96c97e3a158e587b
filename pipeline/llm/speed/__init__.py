"""How fast engines of a language model answer: the race, its figures, and their roof."""
