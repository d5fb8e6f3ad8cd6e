"""What all ranks do together outside of messages."""
