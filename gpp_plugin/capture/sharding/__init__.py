"""Which operators of a captured graph tensor ranks can share out."""
