from .facts import POOLS as POOLS, FeatureBatch as FeatureBatch, FeatureSource as FeatureSource
