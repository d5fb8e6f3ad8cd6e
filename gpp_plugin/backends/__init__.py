"""Runs forwards that take no gradients on the backend that is fastest by measurement, each checked against torch."""
