"""Files: safetensors, Hugging Face folders, the folder of a training run. A file is written whole or not at all."""
