"""Accounts and their API keys: who calls, and what the key may do."""
