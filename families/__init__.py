"""What a model is: data, one small file per family. Importing this room starts nothing."""
