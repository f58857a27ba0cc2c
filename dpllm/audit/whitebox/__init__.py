"""The engine under watch, and what one gradient gives away."""
