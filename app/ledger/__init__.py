"""Tokens: grants, Holds, and the entries that resolve them. Integers only."""
