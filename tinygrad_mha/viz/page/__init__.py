"""The walkthrough page: an attention layer, measured on an input and written as one HTML file."""
