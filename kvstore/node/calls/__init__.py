"""What clients ask of a store node: gets, puts, erasures."""
