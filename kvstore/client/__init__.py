"""The store as others see it: `store` for workers, `tensors` for any other program."""
