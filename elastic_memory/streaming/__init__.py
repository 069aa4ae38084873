"""Streams of any length in constant memory."""
