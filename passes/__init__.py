"""Graph passes of tcport: one pass, one file."""
