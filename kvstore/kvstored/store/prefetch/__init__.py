"""Prefetch by prediction: what will be requested is brought to the mapped tier before it is.

`feed` gives the requests to a predictor, `queue` chooses from its guesses, `prefetcher` moves blocks, and `credit`
judges by tenant what it was good for, and turns it down where it was not.
"""
