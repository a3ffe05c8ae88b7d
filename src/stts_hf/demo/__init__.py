"""A page in the browser that answers questions about videos and shows what the model looked at."""
