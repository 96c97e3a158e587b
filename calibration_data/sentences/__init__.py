"""The sentence encoder all-MiniLM-L6-v2 and real English sentences: the model of
configs/minilm.yaml.
"""
