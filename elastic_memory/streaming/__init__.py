"""Reading without end in constant memory."""
