from .facts import DTYPES as DTYPES, POOLS as POOLS, FeatureBatch as FeatureBatch, FeatureSource as FeatureSource
from .job import ExtractionJob as ExtractionJob
from .run import Extraction as Extraction, extract as extract
