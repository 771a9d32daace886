"""What belongs to another library, one folder per library: transformers, PEFT, TRL, accelerate."""
