"""What to compile: the plan's schema, the recipes that follow from it, the model's source."""
