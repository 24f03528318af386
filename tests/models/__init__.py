"""Fetching and adding models."""
