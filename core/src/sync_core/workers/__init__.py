"""Workers: what runs them, which there are, and what is known of each."""
