"""Quality says how much a codec of the store changes a model's answers: the probabilities of the next tokens after a
prefix whose K and V went through the codec, against those after the prefix itself.
"""
