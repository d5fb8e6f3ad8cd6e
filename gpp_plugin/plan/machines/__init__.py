"""Where stages go on the machines there are: devices of several speeds, and which stages share a node."""
