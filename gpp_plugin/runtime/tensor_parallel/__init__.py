"""Stages whose tensor ranks share out the operators of a captured model."""
