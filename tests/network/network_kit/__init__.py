"""What the tests of networks run: hosts, the switch between them, and programs on them."""
