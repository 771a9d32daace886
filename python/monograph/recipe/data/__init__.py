"""From the rows of files to tokens and labels."""
