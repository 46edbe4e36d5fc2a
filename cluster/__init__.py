"""Ray, and everything a person or a network talks to. The only package that imports Ray."""
