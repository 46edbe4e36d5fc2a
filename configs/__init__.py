"""Deployment files that ship with the package; cluster/shipped.py reads them."""
