"""Prefetch by prediction: blocks that will be requested are brought to the mapped tier before the request.

`feed` gives the requests to a predictor, `queue` chooses from its guesses, `prefetcher` moves blocks, and `credit`
judges by tenant how useful it was, and reduces it if it was not.
"""
