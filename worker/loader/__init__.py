"""Where weights come from: GGUF files, Hugging Face directories, the hub, or a random generator."""
