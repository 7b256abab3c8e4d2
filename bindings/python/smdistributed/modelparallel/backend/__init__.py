"""Holds the exceptions that launch toolkits look for."""
