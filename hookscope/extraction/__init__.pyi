from .facts import POOLS as POOLS, FeatureBatch as FeatureBatch, WrittenFeatures as WrittenFeatures
from .files import FeatureSource as FeatureSource, WritingRun as WritingRun
from .formats import FORMATS as FORMATS
from .job import ExtractionJob as ExtractionJob
from .output import check_output as check_output
from .run import Extraction as Extraction, extract as extract
