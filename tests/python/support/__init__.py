"""What tests share: models, inputs, references, stand-ins, and the programs that they start."""
