"""Stored vectors as users see them: upload, list, read, delete. Numbers: app/steering/vectors."""
