"""Small deliberate faults in our code, and the tests that must see each of them."""
