"""A store node among others: copies, handover and departure, and what they tell each other."""
