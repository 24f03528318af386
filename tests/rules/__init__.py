"""Tests about the code itself: directions, sizes, words, documents."""
